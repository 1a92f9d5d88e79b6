"""`python -m lit_cifar chaos`: kills, stops and resizes a training and limits its files; nothing may be lost."""
