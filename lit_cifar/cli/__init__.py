"""`python -m lit_cifar`: the command line, and its checks before anything starts."""
