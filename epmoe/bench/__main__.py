"""python -m epmoe.bench"""

from .run import main

main()
