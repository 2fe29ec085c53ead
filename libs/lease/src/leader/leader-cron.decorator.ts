import { Cron, type CronOptions } from '@nestjs/schedule';
import type { LeaderService } from './leader.service';

export const LEADER_CRON = Symbol('leasehold:leader-cron');
/** Which leader an instance's methods ask; filled by the explorer when the application starts. */
const leaders = new WeakMap<object, Map<string, LeaderService>>();

export function bindLeader(instance: object, name: string, leader: LeaderService): void {
  const byName = leaders.get(instance) ?? new Map<string, LeaderService>();
  leaders.set(instance, byName.set(name, leader));
}

type Method = (this: object, ...args: never[]) => unknown;

/**
 * `@nestjs/schedule`'s `@Cron` that fires on the leader only (R36). The job must still be safe to run twice: a leader that was frozen
 * may finish its tick beside the next leader's.
 *
 * @param options as `@Cron`'s, plus `instance`: the name of the lease instance whose leader counts (default 'default')
 */
export function LeaderCron(
  expression: string | Date,
  options: CronOptions & { instance?: string } = {},
): MethodDecorator {
  const { instance: name = 'default', ...cronOptions } = options;
  return (target, key, descriptor: PropertyDescriptor) => {
    const method = descriptor.value as Method;
    const guarded = function (this: object, ...args: never[]): unknown {
      return leaders.get(this)?.get(name)?.isLeader ? method.apply(this, args) : undefined;
    };
    Object.defineProperty(guarded, 'name', { value: method.name });
    for (const metadataKey of Reflect.getMetadataKeys(method) as unknown[]) {
      Reflect.defineMetadata(metadataKey, Reflect.getMetadata(metadataKey, method), guarded);
    }
    Reflect.defineMetadata(LEADER_CRON, name, guarded);
    descriptor.value = guarded;
    // A tick that is still running is not started a second time.
    Cron(expression, { waitForCompletion: true, ...cronOptions })(target, key, descriptor);
  };
}
