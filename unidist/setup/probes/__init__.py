"""Each script here runs inside a new environment and ends well only if its framework really works there."""
