"""The 13 tasks of RULER: `ruler.example` makes their prompts."""
