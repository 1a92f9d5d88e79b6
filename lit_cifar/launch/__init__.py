"""How the processes of a run come to be: where they meet, on which interface they listen, who started them."""
