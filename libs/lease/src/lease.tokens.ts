import { Inject, type Type } from '@nestjs/common';

/**
 * The token of a service of a named instance; the default instance's services are their own classes. Beside a named instance inject the
 * default one's: `app.get(JobsService)` looks in every module and finds either's.
 */
export const getLeaseToken = (service: Type<unknown>, name = 'default'): Type<unknown> | string =>
  name === 'default' ? service : `leasehold:${name}:${service.name}`;

/** Injects a service of a named instance: `@InjectLease(JobsService, 'reports') jobs: JobsService`. */
export const InjectLease = (service: Type<unknown>, name = 'default'): ReturnType<typeof Inject> =>
  Inject(getLeaseToken(service, name));
