"""One HTML page about finished runs, made from their folders alone: reading, comparison, charts, page."""
