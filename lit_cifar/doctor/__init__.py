"""Whether a machine is fit to train in parallel: what `python -m lit_cifar doctor` looks at and how it judges."""
