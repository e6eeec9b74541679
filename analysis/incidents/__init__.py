"""Incidents: violations and findings that share a cause, with the kind of mistake that it looks like; docs/reference/incidents.md."""
