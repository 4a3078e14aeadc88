"""What is counted, and how it comes to the driver."""
