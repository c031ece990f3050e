"""The measurements and preparations of studies, each a registered function, by topic."""
