"""Plan: from requests and block table to verify entries and write metadata."""
