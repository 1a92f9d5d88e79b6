"""`python -m lit_cifar report`: one HTML page about finished runs."""
