"""Telemetry: what is counted and traced of an engine's requests.

latencies      histograms of requests, for metrics
request_trace  spans of one request
traced_steps   steps that ranks are asked to time, as spans
"""
