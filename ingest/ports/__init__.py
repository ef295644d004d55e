"""Readers of InfiniBand port counters without an exporter: sysfs trees and perfquery output."""
