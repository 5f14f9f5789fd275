"""Measurements of training: where time goes, throughput, hardware telemetry, gradient noise."""
