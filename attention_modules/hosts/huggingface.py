HOSTS = ()
