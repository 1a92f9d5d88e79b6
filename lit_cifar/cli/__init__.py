"""`python -m lit_cifar`: the command line, and what it checks before anything starts."""
