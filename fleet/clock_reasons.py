"""The bits of `clock_event_reasons`, which say why a GPU's clock is reduced. DCGM defines all but one of them."""

IDLE = 0x1
POWER_CAP = 0x4  # normal under load
SLOWDOWN = 0x8  # in hardware, of heat or with a power brake
SOFTWARE_THERMAL = 0x20
HARDWARE_THERMAL = 0x40
BRAKE = 0x80
MEMORY_THERMAL = 0x10000  # ours: DCGM has no reason of the memory's own
THERMAL = SLOWDOWN | SOFTWARE_THERMAL | HARDWARE_THERMAL | MEMORY_THERMAL
