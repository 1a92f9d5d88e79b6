"""`python -m lit_cifar chaos`: kills, stops and resizes a small training and fills its disk; nothing may be lost."""
