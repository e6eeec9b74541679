"""Comparing two traces of one workload: the same requests, whatever slots, chunks and batches they were given."""
