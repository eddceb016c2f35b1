"""What runs on the device, and `reference`: the plain meaning that all of it is compared with."""
