"""What a user can cause and can mend."""


class UserError(ValueError):
    """Something in a config, a path or an environment that the user can change.

    Its text is one sentence that names the offending value and says what to do. Commands print it and exit
    with status 2, without a traceback; from Python it is an ordinary ValueError.
    """


class Unsupported(UserError, NotImplementedError):
    """A strategy or kernel that was named cannot do what is asked: its limit and the value."""
