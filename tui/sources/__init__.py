"""Where the dashboard gets a job from: live files, a recording, another host."""
