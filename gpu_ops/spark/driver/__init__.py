"""What runs in the driver: which server owns which partition, and how servers come up and are replaced."""
