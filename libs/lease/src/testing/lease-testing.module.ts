import { type DynamicModule, Module, type Provider } from '@nestjs/common';
import { ModulesContainer } from '@nestjs/core';
import { LeaseModule, type LeaseAsyncOptions } from '../lease.module';
import { getLeaseToken } from '../lease.tokens';
import type { LeaseOptions } from '../options/lease-options';
import { LeaseTesting } from './lease-testing';

/** LeaseModule's options. `role`, `wakeUp` and `store` are the kit's; `migrate` is true by default, `connection.poolMax` 3. */
export type LeaseTestingOptions = LeaseOptions;

/** As LeaseModule's. */
export type LeaseTestingAsyncOptions = LeaseAsyncOptions;

/**
 * LeaseModule for tests: the same injectables, and LeaseTesting, but nothing runs unless the test says so. No worker, no beat, no leader, no
 * LISTEN and no timer is started, and no ScheduleModule is needed. `@LeaderCron` methods never fire.
 */
@Module({})
export class LeaseTestingModule {
  static forRoot(this: void, options: LeaseTestingOptions): DynamicModule {
    return build(LeaseModule.forRoot(forTests(options)), options?.name);
  }

  /** The options from elsewhere, for example with a `connection.dataSource` that is injected. */
  static forRootAsync(this: void, { useFactory, ...rest }: LeaseTestingAsyncOptions): DynamicModule {
    const module = LeaseModule.forRootAsync({
      ...rest,
      useFactory: async (...args: never[]) => forTests(await useFactory(...args)),
    });
    return build(module, rest.name);
  }
}

const forTests = <T extends Omit<LeaseOptions, 'name'>>(options: T): T => ({
  migrate: true,
  ...options,
  connection: { poolMax: 3, ...options?.connection },
  role: 'producer',
  wakeUp: 'off',
  store: 'shared',
});

function build(lease: DynamicModule, name = 'default'): DynamicModule {
  const token = getLeaseToken(LeaseTesting, name);
  const kit: Provider = {
    provide: token,
    inject: [ModulesContainer],
    useFactory: (modules: ModulesContainer) => new LeaseTesting(modules, name),
  };
  return { module: LeaseTestingModule, global: true, imports: [lease], providers: [kit], exports: [token] };
}
