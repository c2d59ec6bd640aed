"""The parts that all ops share: arguments' checks, segments, states, decays, scans over chunks, and devices
that have consecutive parts of a row.
"""
