"""`python -m lit_cifar chaos`: a small training is killed, stopped, resized and robbed of its disk; nothing is lost."""
