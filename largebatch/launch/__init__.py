"""What starts ranks: launchers, hosts, cores, drivers. Standard library only."""
