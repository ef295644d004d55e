"""Faults and benign look-alikes: when they happen, what they do to the hardware, and their truth."""
