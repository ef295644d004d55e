"""Faults and harmless look-alikes: their times, their effects on the hardware, and the truth about them."""
