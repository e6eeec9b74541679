"""Hunting: generated workloads for a real engine, recorded and judged as it runs; and what came of them, made smaller."""
