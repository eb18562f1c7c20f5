"""epmoe inside of other projects.  Each module imports its project only when it is imported itself."""
