"""Several devices at a site: a process for each, in step; the rest of the client knows rank 0 alone."""
