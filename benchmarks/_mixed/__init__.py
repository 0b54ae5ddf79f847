"""What ``mixed_precision.py`` trains: images and text, residual and recurrent networks, and three precisions."""
