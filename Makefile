# Each target is one line of Python that works the same without make.
PROFILE ?= quick

study: ; python3 make.py study --profile $(PROFILE)
keep: ; python3 make.py keep
book: ; python3 make.py book
test: ; python3 make.py test
test-long: ; python3 make.py test-long
lock: ; python3 make.py lock
environment: ; python3 make.py environment
setup: ; python3 make.py setup
clean: ; python3 make.py clean

.PHONY: study keep book test test-long lock environment setup clean
