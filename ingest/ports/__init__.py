"""InfiniBand port counters read without an exporter: sysfs trees and perfquery output."""
