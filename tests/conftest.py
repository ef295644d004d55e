"""For every test: what a property holds has nothing to do with how busy the machine is that it is tested on."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
