"""Who runs the tasks: a pool of pinned worker processes, or this process. Behind `concurrent.futures.Executor`."""
