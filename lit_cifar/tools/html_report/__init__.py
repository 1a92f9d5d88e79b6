"""One HTML page about finished runs: what is compared, the charts, the template."""
