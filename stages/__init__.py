"""One file a stage: argv to config to ranks to one library call to an exit code."""
