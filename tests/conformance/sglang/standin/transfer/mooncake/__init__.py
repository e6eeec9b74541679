"""Stands in for the mooncake package: SGLang's own mooncake backend, between processes of one machine."""
