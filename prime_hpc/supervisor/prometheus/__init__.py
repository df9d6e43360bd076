"""The run's figures in Prometheus' form: of every role, process, environment and server, from the supervisor."""
