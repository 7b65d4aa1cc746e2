"""Where panels stand, from 1 x 1 cells up; no terminal needed."""
