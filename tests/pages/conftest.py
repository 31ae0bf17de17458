"""The page that these tests build and damage."""

from tests.pages.toy import toy as toy
