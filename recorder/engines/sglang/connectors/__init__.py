"""What SGLang copies out of its pool and into it: to and from the host, a storage behind it, and the other engine of a pair."""
