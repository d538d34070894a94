"""The chapters as pytask's tasks: one each, with everything that makes it stale.

`moecache study` calls this; `pytask notebooks` by itself runs the quick edition. On a cluster the same tasks run with
`pytask notebooks --parallel-backend dask`.
"""

from pathlib import Path
from typing import Annotated, Any

from pytask import Product, PythonNode, mark, task

from moecache.chapters.study import jobs_of_this_session

SHOW_OTHERS = ("10",)  # these show what another chapter has measured, so they come after it


def _in_time(function: Any) -> Any:
    return function


for _job in jobs_of_this_session():

    @task(
        id=f"{_job.edition.name}-{_job.target.stem}",
        kwargs={"job": PythonNode(value=_job), "work": PythonNode(value=_job.work, hash=True)},
    )
    @(mark.alone if _job.chapter.is_alone else mark.together)
    @(mark.try_last if _job.chapter.number in SHOW_OTHERS else _in_time)
    def task_chapter(
        job: Any,
        work: str,
        dependencies: tuple[Path, ...] = _job.dependencies,
        target: Annotated[Path, Product] = _job.target,
    ) -> None:
        """Run one chapter."""
        job.run()
