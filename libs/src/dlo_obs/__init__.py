"""What every process shares to be observed: log setup. Knows no other package of ours."""
