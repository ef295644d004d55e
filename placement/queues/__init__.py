"""The tree of queues: order, quota, shares, charges and credits. It knows no machines."""
