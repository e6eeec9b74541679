"""`python -m kvcanary`: what `kvcanary` does, where its script is not on the path."""

from .cli import kvcanary_main

if __name__ == "__main__":
    kvcanary_main()
