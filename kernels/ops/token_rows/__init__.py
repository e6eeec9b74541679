"""Token rows: are captured bytes what a table of tokens says, turned by the position?"""
