import { Injectable, type InjectableOptions, type Type, applyDecorators } from '@nestjs/common';
import type { InstanceWrapper } from '@nestjs/core/injector/instance-wrapper';
import type { Handler, HandlerMetadata, JobHandlerOptions } from './handler.types';

const METADATA = Symbol('leasehold:job-handler');

/**
 * Marks a class as the handler of a kind of jobs. List it as a provider in any module; it is found when the application starts.
 *
 * @param kind e.g. 'invoice.send'; one class a kind and instance
 * @param options see JobHandlerOptions; the module's `handlers` option can override them from configuration
 */
export function JobHandler(kind: string, options: JobHandlerOptions & InjectableOptions = {}): ClassDecorator {
  const { scope, durable, ...own } = options;
  const injectable = scope === undefined ? {} : { scope, ...(durable === undefined ? {} : { durable }) };
  return applyDecorators(Injectable(injectable), (target: object) => {
    Reflect.defineMetadata(METADATA, { kind, options: own } satisfies HandlerMetadata, target);
  });
}

/** The kind and options of a decorated class, its own only: a subclass is a handler if it is decorated itself. */
export const handlerMetadata = (target: object): HandlerMetadata | undefined =>
  Reflect.getOwnMetadata(METADATA, target) as HandlerMetadata | undefined;

/** The decorated class behind a provider: what it is made of or, for a factory or a value, what it is provided as. */
export function handlerTypeOf({ metatype, token, isAlias }: InstanceWrapper): Type<Handler> | undefined {
  if (isAlias) return undefined;
  const isHandler = (candidate: unknown): candidate is Type<Handler> =>
    typeof candidate === 'function' && handlerMetadata(candidate) !== undefined;
  return [metatype, token].find(isHandler);
}
