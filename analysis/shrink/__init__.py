"""The smallest trace that still shows an incident: events left out by trial, what is left renamed, and the proof."""
