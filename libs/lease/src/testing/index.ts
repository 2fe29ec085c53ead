/** `@leasehold/nestjs/testing`: for tests of applications that use Leasehold. Never import it in what runs in production. */
export { LeaseTestingModule, type LeaseTestingAsyncOptions, type LeaseTestingOptions } from './lease-testing.module';
export { LeaseTesting, type NextJob } from './lease-testing';
export type { DrainOptions } from './drain';
export type { EnqueuedJob, EnqueuedOptions } from './enqueued';
export type { AsymmetricMatcher, PartialPayload, PayloadMatcher } from './payload-matcher';
export type { RunReport } from './run-report';
export * from './errors';
