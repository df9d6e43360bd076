"""Episodes in processes of their own: workers that an environment may block, crash or fill without harm to others.

    orchestrator: EnvPool -> Fleet (one an environment) --- socket ---> worker process: EnvPool with that environment
                               |                                          ^ forked by
                               +---- control socket ------------------> host process (verifiers imported, no thread)

`fleet` deals episodes out and plays again those of a worker that died; `host_link` starts the host; `host` forks and
ends workers; `worker` plays. `frames`, `records` and `settings` are what is said over the sockets, `fingerprint` tells
whether both sides run the same code.
"""
